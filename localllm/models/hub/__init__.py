"""Everything that talks to the Hugging Face hub. Models live in its cache and nowhere else.

repository  what the hub has: search, files with sizes and hashes     choice     which files a load needs
plan        what a download will fetch, before it fetches anything    transfer   one file, resumed and checked
pull        several files, progress, cancel                           downloads  several pulls at once, for a server
peek        config and headers of a checkpoint that is not here       cache      what is here, and removing it
client      the library's session, with our timeouts and errors       account    the token
"""
