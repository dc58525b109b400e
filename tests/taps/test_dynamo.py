"""Whether anything is compiled is asked without an import of dynamo, and while another thread imports it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, threading, time
import torch
from gradwatch.taps.dynamo import anything_compiled

assert "torch._dynamo.utils" not in sys.modules and not anything_compiled()
begun, wrong, over = threading.Event(), [], threading.Event()

def ask():
    begun.set()
    while not over.is_set():
        try:
            assert not anything_compiled()
        except Exception as error:
            wrong.append(repr(error))
            return
        time.sleep(1e-4)  # the import goes on meanwhile: it is asked thousands of times until its end

asking = threading.Thread(target=ask)
asking.start()
begun.wait()
sys.setswitchinterval(1e-5)
import torch._dynamo  # as the first optimizer does
over.set()
asking.join()
print(wrong, anything_compiled())
"""


def test_an_import_of_dynamo_under_way_in_another_thread_is_no_error() -> None:
    """What a module that is being imported does not have yet, nothing has counted."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"
