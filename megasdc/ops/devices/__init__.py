"""Telemetry of devices and of the host: what NVML, the kernel and the disks report, by rules a verdict; no torch.

It is context for an incident and may keep a device out of a run. It is no proof of silent data corruption.
"""
