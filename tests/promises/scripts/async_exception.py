"""A timeout delivered by PyThreadState_SetAsyncExc while the main thread trains: bare catches 30 of 30."""

import contextlib
import ctypes
import sys
import threading
import time

import torch

m = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
o = torch.optim.AdamW(m.parameters(), 1e-2)


class Timeout(Exception):
    pass


def step():
    o.zero_grad()
    m(torch.ones(2, 4)).square().mean().backward()
    o.step()


me, hits, training = threading.get_ident(), 0, threading.Event()


def fire():
    training.wait()  # however long a busy machine takes to begin
    time.sleep(0.02)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(Timeout))


if "watched" in sys.argv:
    import gradwatch

    gw = gradwatch.watch(m, o, rules="default")
for _ in range(30):
    thread = threading.Thread(target=fire)
    thread.start()
    end = time.time() + 60  # it comes much sooner
    try:
        training.set()
        while time.time() < end:
            step()
    except Timeout:
        hits += 1
    training.clear()
    with contextlib.suppress(Timeout):
        thread.join()
print("caught", hits, "of 30")
