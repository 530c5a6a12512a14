"""Files of ours: JSON that is read strictly, and writing that leaves nothing half done."""
