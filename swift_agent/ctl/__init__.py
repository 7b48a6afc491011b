"""`swiftctl`: one module per command."""
