"""Measurements that select the options of drafters: `specdec tune`, and the estimates of rule `best`."""
