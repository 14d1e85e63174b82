"""Benchmarks of a server or an engine, and the search for good settings by measuring them: bench and tune.

bench.py load_client.py report.py workload.py   measure a server or an engine under a known load
goals.py space.py kept_places.py                what to optimise, which settings may change, how places compared before
trial.py drive.py figures.py                    one trial of settings, on weights that stay loaded
search.py soak.py                               which settings to try next; a check that a pick has to pass
run.py profile.py words.py                      the whole run; the saved profile; the printed texts
"""
