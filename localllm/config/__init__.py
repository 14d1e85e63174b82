"""Settings: what there is to set, where each value comes from, and the file that keeps them.

settings.py       the table of settings, and frozen values that know their source
setting_spec.py   the description of one setting: parse, check and show a value
lora_modules.py   the value of one setting: names and paths of adapters
speculative.py    the value of one setting: speculation in vLLM's form
mcp_servers.py    servers of tools: the [mcp.servers.NAME] tables
resolve.py        flags, environment and config file become values
edit.py           change config.toml: one setting, or one table of a server of tools
flags.py          the flags of all settings, for argparse
unsupported.py    options of other servers, refused by name
"""
