"""Random configurations, schedules and faults: each case is drawn, run in the simulator and judged.

campaign    A campaign: cases are drawn, run and judged until the budget is spent or one surprises
case        A fuzz case: one frozen value that fixes a whole run
command     what `dbo fuzz` runs: one case by its token, or a campaign
compact     A case in few characters: `f2:` and one number in base 64, with a check sum
ledger      failures that are known and not fixed yet
machines    state machines over coordination: several ranks' schedulers
numeric     the numeric side of a case: weights of its model, and the same requests unsplit on one rank
profiles    how much is drawn: Hypothesis profiles, chosen by HYPOTHESIS_PROFILE
spelling    A case spelt out, in letters and numbers that a person reads:
strategies  hypothesis strategies for whole runs: sizes
targets     runs a case and judges it
"""
