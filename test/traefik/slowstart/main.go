// Command slowstart waits, and then becomes the program that follows: a server
// that needs a while until it listens.
package main

import (
	"os"
	"syscall"
	"time"
)

func main() {
	d, err := time.ParseDuration(os.Args[1])
	if err != nil {
		panic(err)
	}
	time.Sleep(d)
	panic(syscall.Exec(os.Args[2], os.Args[2:], os.Environ()))
}
