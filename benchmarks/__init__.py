"""How fast it serves, how fast it learns, and what a stream notices of it. Each script says how it measures.

    python -m benchmarks.serving      tokens a second served, beside plain `generate`
    python -m benchmarks.training     tokens a second trained, beside a padded loop of transformers and PEFT
    python -m benchmarks.latency      waits of a streaming client while it learns and while a version is published
    python -m benchmarks.publishing   many clients while a version is published every two seconds: failures, cut
                                      streams, wrong tags, added waits; ten minutes, so not part of `make bench`
    python -m benchmarks.load         what a request and a streamed token cost over HTTP, beside `transformers serve`;
                                      failures and memory over ten thousand requests; long, so neither
    python -m benchmarks.flaws        what flaws of published code cost in the experiment of `nextstate eval people`
    python -m benchmarks.results_page the tables of docs/results.md, from the records of both

Sides that are compared take turns within one run, so that other work on the machine meets them alike, and ratios are
taken within a turn.
"""

# Sets how torch's threads wait, which has to happen before any of the scripts imports torch.
import nextstate as nextstate
