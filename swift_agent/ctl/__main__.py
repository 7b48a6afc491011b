"""`python -m swift_agent.ctl`."""

from swift_agent.ctl.main import cli

cli()
