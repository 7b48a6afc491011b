"""etcd, and its stand-in for tests."""
