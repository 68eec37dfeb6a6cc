// Package ext stands in for the two empty structs of Traefik's own.
package ext

type HTTP struct{}

type Router struct{}
