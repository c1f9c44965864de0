"""What follows an audit in which results differ, in any training: votes, repeats, the referee, elements elsewhere."""
