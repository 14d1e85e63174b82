"""Measuring: `localllm bench`, and `localllm tune`, which finds settings by trying them.

bench.py load_client.py report.py workload.py   what a server or an engine does under a known load
goals.py space.py                               what is wanted, and what may be changed for it
trial.py drive.py figures.py                    settings, tried once on weights that stay loaded
search.py guard.py soak.py                      which are tried next; what a pick has to stand
run.py profile.py words.py                      all of it in order; what is kept; what is said of it
"""
