"""The ``omniplane`` command: one subcommand per service, loaded only when asked for."""
