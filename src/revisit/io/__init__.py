"""Files and records: read what data names safely, write whole files or none."""
