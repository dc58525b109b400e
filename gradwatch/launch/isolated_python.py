"""`python -I isolated_python.py SCRIPT ARGS…`: the way in where Python ignores PYTHONPATH (-E, -I) or site (-S).

It installs the import hook itself, then becomes the script: same `sys.argv`, `sys.path`, `__main__`.
"""

import os
import sys

_bootstrap = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
sys.path.insert(0, _bootstrap)
__import__("gradwatch_import_hook").install()
sys.path.remove(_bootstrap)

__import__("gradwatch.launch.run_script", fromlist=["become"]).run_script(sys.argv[1:])
