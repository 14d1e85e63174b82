"""Settings: what there is to set, where each value comes from, and the file that keeps them.

settings.py      frozen settings that know their source     config_file.py   read and edit config.toml
unsupported.py   options of other servers, refused by name
"""
