module github.com/go-acme/lego/v5

go 1.26.0
