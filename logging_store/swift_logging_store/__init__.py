"""Tensor logs on local disk, HDFS or S3: what pipeline neighbours sent each other, kept until a checkpoint covers it.

So far the format, and logs on a local disk; `logging_store/README.md` says what comes. This room must never import the
others.
"""
