"""The objects that a script has named, and where its loop stands."""
