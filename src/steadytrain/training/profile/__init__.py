"""Where the seconds of training go, and how fast its parts are: clock, timed passes, bench, probe."""
