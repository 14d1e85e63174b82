"""Everything that talks to the Hugging Face hub. Downloaded models are stored in its cache only.

repository  what the hub has: search, files, and which of them a load needs
plan        what a download will transfer                             transfer   one file, resumed and verified
pull        several files, progress, cancel                           downloads  several pulls at once, for a server
peek        config and headers of a remote checkpoint                 cache      local files, and deleting them
client      the library's session, with our timeouts and errors; the token
"""
