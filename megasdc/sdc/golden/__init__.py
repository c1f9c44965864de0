"""Golden traces: their files, for which machines they hold, and what follows where a rank differs from one."""
