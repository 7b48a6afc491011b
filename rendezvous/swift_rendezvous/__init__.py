"""Which nodes train together: membership of a job, kept in etcd.

Start reading at `kv` (the contract of the store), then `etcd` (its implementation). This package knows nothing of
torch's processes, of recovery plans or of tensor logs.
"""
