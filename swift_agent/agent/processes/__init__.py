"""The worker processes of one node: started, forked from a standby server, signalled, reaped."""
