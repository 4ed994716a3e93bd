package consumer

import "time"

// StallAfter sets after how long c is said to stand still.
func StallAfter(c *Consumer, d time.Duration) { c.dog.stall = d }
