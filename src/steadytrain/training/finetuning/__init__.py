"""Fine-tuning beyond updates: the linear probe, and the plan that fits a run into a number of minutes."""
