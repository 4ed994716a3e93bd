SELECT bucket, epoch, mark, bumped_at FROM credit_epoch WHERE bucket = $1
