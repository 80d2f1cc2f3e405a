"""Writes as many short lines as the second argument says, as fast as the reader takes them.

The text is made before the first line is written, and goes out in large pieces, so that the worker is not what is
measured. All workers begin together. The mark's number is the wall-clock time, because it is compared with the time at
which a file was last written.
"""

import os
import sys
import time

import marks

PIECE_BYTES = 256 * 1024

text = bytearray()
for number in range(int(sys.argv[2])):
    text += b"worker %d line %09d of the talk\n" % (marks.RANK, number)
marks.leave("filled")
marks.await_all("filled")
marks.leave("began", value=time.time_ns())
rest = memoryview(text)
while rest:
    rest = rest[os.write(1, rest[:PIECE_BYTES]) :]
