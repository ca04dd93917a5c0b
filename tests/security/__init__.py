"""Bad input over real sockets: attacks T.., and the oracle that watches meanwhile."""
