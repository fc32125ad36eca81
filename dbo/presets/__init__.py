"""Schedules that ship with the project, one `.schedule` file per preset; `dbo.schedule.presets` reads them."""
