"""Run a Python program by a clock of processor time: a second is one that its process computed.

On a machine that others use, wall time says how busy it was. What a program measures and limits by ``time.time``,
``time.perf_counter`` and ``time.monotonic`` is here the processor time of all threads of its process, so that minutes
mean the same on any day. It is an emulation: child processes do not count, so that loaders have to be threads; what
waits for a lock or a disk does so for nothing; waits with a time limit keep to the wall clock.

usage: python cpu_clock.py MODULE|FILE.py ARGUMENT ...
"""

import runpy
import sys
import time

began = time.time() - time.process_time()
time.perf_counter = time.monotonic = time.process_time
time.time = lambda: began + time.process_time()

if __name__ == "__main__":
    del sys.argv[0]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    run(sys.argv[0], run_name="__main__", **({} if run is runpy.run_path else {"alter_sys": True}))
