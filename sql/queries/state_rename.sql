-- A row that no relay has ever adopted is only a wish (posthaste mode before the first start): it may change its name.
UPDATE relay_state SET name = $1, changed_at = clock_timestamp() WHERE epoch = 0
