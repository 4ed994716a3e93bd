UPDATE credit_epoch SET epoch = $2, bumped_at = clock_timestamp() WHERE bucket = $1
