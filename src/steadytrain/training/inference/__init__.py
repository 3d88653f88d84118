"""Trained weights in use: restored, evaluated, asked for predictions and features, calibrated, converted."""
