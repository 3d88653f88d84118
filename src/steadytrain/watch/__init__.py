"""What a run does with its time: samples of the machine, the ledger of its seconds, the verdict. Needs no torch."""
