"""First of a fork server's preloaded modules: until ``frozen`` is imported, what libraries do not need is left out."""

from megasdc.common.imports.kept import leave_out

leave_out()
