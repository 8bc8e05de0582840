"""Files that lie elsewhere, by URL: `s3://`, `gs://`, and `file://` on the machine that runs forq.

In: a URL under one of the allowed roots (`[storage]`). Out: for an input, a local copy to read as any other file; for
an output, an object that appears when it is whole. Transfers run in a process of their own (`transfer.py`).
"""
