SELECT bucket, epoch, mark, issued, bumped_at FROM credit_epoch WHERE bucket = $1
