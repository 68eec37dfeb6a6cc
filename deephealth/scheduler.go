package deephealth

import (
	"math"
	"runtime/metrics"
	"time"
)

// schedulerName is the check of the Go scheduler.
const schedulerName = "scheduler"

// scheduler measures how long goroutines that could run wait for a processor: the
// first thing to grow when a server has more to do than it can, or than its cgroup
// lets it.
type scheduler struct{ before []uint64 }

// late is how long one in a hundred waited, at least, since the call before.
func (s *scheduler) late() time.Duration {
	sample := []metrics.Sample{{Name: "/sched/latencies:seconds"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindFloat64Histogram {
		return 0 // a Go that does not tell
	}
	h := sample[0].Value.Float64Histogram()
	now := append([]uint64(nil), h.Counts...)
	since := append([]uint64(nil), now...)
	for i := range s.before {
		since[i] -= s.before[i]
	}
	s.before = now
	return percentile99(since, h.Buckets)
}

// percentile99 is the lower bound of the bucket that holds it, for a bucket may be
// wide.
func percentile99(counts []uint64, bounds []float64) time.Duration {
	var all, above uint64
	for _, n := range counts {
		all += n
	}
	for i := len(counts) - 1; i >= 0; i-- {
		if above += counts[i]; above > 0 && above*100 >= all {
			return time.Duration(max(0, math.Min(bounds[i], math.MaxInt32)) * float64(time.Second))
		}
	}
	return 0
}
