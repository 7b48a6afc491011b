"""`python -m swift_agent.ctl`. Must never hold more than the call of the command."""

from swift_agent.ctl.main import cli

cli()
