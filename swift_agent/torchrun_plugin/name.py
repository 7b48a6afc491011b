"""The name by which torchrun is asked for this rendezvous: ``--rdzv-backend swift-etcd``.

This module must never import torch: the entry point's module is imported by every torchrun.
"""

BACKEND = "swift-etcd"
