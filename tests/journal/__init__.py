"""The recording of a run: format, crashes, disks, audit."""
