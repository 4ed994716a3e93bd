SELECT bucket, epoch, mark, bumped_at FROM credit_epoch ORDER BY bucket
