//! What messages of other software mean.
