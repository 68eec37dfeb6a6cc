package caddymodule

import "time"

// born is an hour before the process began, so that 0 is long ago. Moments that are
// compared are counted from it, by the monotonic clock: somebody may set the machine's.
var born = time.Now().Add(-time.Hour)

// clock is now, in nanoseconds since born.
func clock() int64 { return int64(time.Since(born)) }

// atClock is the moment that clock gave.
func atClock(ns int64) time.Time { return born.Add(time.Duration(ns)) }
