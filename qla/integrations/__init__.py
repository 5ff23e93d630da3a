"""qla under other libraries' names; each module is imported on its own and imports its library when it is switched on."""
