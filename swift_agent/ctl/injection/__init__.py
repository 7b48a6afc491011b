"""`swiftctl inject` and `swiftctl campaign`. See README.md."""
