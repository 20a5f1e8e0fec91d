"""Does what this project does differently make better models? Small trainings with known truth."""
