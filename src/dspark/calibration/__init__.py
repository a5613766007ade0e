"""What is measured of a pair on a machine, once, for those who decide by it: scheduler, doctor, forecast."""
