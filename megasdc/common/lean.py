"""First of a fork server's preloaded modules: until ``frozen`` is imported, what libraries do not need is left out."""

from __future__ import annotations

from megasdc.common.imports import leave_out

leave_out()
