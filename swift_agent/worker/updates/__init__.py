"""Was the update of this iteration made? Updates that overlap the backward."""
