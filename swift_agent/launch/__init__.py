"""From a command line to one frozen configuration, and what the caller sees at the end."""
